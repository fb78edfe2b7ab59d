"""Many questions: asked at the same time, written down as they are answered, and gone on with after a kill."""
