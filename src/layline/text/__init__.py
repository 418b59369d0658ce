"""Text in and out of the model: tokenizer, chat template, incremental decoding, stop strings."""
