"""The simulated clock: engine cores, routers, links, deployments."""
