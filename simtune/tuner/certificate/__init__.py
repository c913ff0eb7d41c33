"""Certificates of searches: what was proved of every plan, to be checked again."""
