"""Generated questions with exact answers. Each task is a pure function of drawn numbers and a length."""
