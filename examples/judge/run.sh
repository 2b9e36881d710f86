# The stand-in, and a run that asks it.
python server.py &
trap "kill $!" EXIT
rlctl train grpo recipe.yaml
