"""Specs that users write: model, hardware, workload, plan, study."""
