"""Plans that a study spans: enumerated, expressible for an engine, divided among the GPUs of a fleet."""
