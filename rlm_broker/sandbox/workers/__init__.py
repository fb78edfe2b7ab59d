"""Workers: their sources, and the handles that hold and end each of them."""
