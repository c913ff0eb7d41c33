"""What users write: model, hardware, workload, plan, study."""
