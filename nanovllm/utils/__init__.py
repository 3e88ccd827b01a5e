"""What several layers share: argument checks, the per-step context, files, tokenizer."""
