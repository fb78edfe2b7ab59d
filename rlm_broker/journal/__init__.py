"""The paid calls of questions: kept in memory for further attempts, and in a journal for further processes."""
