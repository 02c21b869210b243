"""Chunk stores on real and simulated disks"""
