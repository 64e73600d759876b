"""The parts of joint fusions, and the pipeline that runs them."""
