"""A plan as the settings files and launch script of a real engine."""
