"""The files of a run: one schema that they are written and read by."""
