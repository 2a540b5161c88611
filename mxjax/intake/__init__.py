"""What comes from outside, and the one way in: files of others, token ids."""
