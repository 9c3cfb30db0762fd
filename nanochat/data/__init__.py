"""Where text comes from (sources, hub, demo) and how it becomes batches (loader)."""
