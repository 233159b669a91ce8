"""Recording one training step of a running job as a Workload."""
