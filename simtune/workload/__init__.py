"""Requests of a load: drawn from a workload spec or a trace, described, fitted by a spec; acceptance of drafts from
logs."""
