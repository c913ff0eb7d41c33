"""A run directory as one self-contained HTML page, and its steps as a timeline for Perfetto."""
