"""The walls around a worker, one kernel mechanism per module. `layers` has the order in which they are raised."""
