"""From a dataset's samples to batches on the device."""
