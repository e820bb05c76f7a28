"""What makes a cluster file unsafe, slow or unable to start."""
