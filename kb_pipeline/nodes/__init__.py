"""The nodes of a task, each from stored output to stored output: work outside, then one fenced transaction."""
