"""The demo: the example job on a real Slurm cluster, once undisturbed and once with a node powered off.

play -> Record (record)   Record + Manifest -> Marks, lanes (timeline)   two Records -> Verdict (verdict)
Marks, Verdict -> story, summary.json (story)   lanes, losses -> timeline.png, loss.png (draw)
"""
