"""What runs on the far side: a warm interpreter (`zygote`) and the forks of it that run programs.

Standard library only, and no import from the rest of quintet: a jail sees this folder and nothing else of ours. Nothing
here decides anything that a candidate could gain by: past `lockdown` a fork belongs to the candidate, and whatever it
writes is a claim about its own values.
"""
