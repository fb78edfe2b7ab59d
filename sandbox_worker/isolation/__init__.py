"""The isolation of a worker, one kernel mechanism per module. `zygote_layers` and `worker_layers` have their order."""
