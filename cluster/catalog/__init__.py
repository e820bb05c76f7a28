"""Price tables from a kept catalog: download, read, combine, write."""
