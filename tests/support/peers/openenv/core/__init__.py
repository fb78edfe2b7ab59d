"""The parts that environments are made of."""
