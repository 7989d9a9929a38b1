"""Loading, adapting and saving the language model and its tokenizer."""
