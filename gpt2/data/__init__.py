"""Token shards, tokenizers, and the batches that each rank draws from them."""
