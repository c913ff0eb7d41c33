"""The simulated clock: engine cores, routers, links, deployments, and what comes out of a run."""
