"""The contract of operations, contexts and fusions, and how changes of modules are seen."""
