"""What is right: the specification in any float dtype, and the error budget."""
