"""Formulas and exact methods that tests hold the package to."""
