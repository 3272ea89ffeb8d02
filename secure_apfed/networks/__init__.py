"""Networks and their objectives: encoders, heads, losses of passives, the rank of tables."""
