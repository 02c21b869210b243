"""Rendezvous: ranks of a group find and authenticate each other."""
