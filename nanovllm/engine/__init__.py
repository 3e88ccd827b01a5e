"""Scheduling, memory and execution: everything between a list of token ids and the next token."""
