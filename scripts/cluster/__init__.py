"""A cluster of three nodes on one machine, the faults that it has to bear, and a simulation of a thousand agents."""
