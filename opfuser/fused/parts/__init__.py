"""What joint fusions consist of: parts, and the pipeline that runs them."""
