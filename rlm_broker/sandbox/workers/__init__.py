"""Workers: their sources, and the handles on each of them."""
