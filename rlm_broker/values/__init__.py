"""Values for every room: texts in their forms, displays, and pages for notebooks."""
