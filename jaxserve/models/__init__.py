"""Model families: one shared decoder, one small options file a family, and the registry that reads HF configs."""
