"""The file format of the published implementation: its heads into head folders and back."""
