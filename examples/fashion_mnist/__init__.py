"""Fashion-MNIST."""
