"""Values that every room uses: text in its forms, and displays."""
