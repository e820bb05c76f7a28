"""Read `ray up` and KubeRay files: node types, capacity, prices."""
