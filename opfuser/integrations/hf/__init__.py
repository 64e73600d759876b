"""What models of Hugging Face's libraries are called with, and give opfuser's layers to."""
