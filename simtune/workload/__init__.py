"""Requests of a load: drawn from a workload spec or a trace, described, and fitted by a spec."""
