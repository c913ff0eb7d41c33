"""How often a target keeps what a drafter proposes, estimated from what engines count and log."""
