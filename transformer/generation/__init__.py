"""Text out of a model: the loop, the decoding step, sampling, chat templates, the tokenizer."""
