"""Mixture of experts: several MLPs in each block, of which a router chooses a few for each token."""
