"""Judgement of predictions: predicted beside measured, and the order of plans."""
