#!/usr/bin/env bash
# Deploy an agent's folder as a runtime that can be invoked. Run it again to deploy a new image of the same agent.
#
#   infra/deploy.sh STACK AGENT_NAME AGENT_FOLDER [Parameter=Value ...]
#
# The parameters are those of template.yaml. Needs docker with buildx and an AWS CLI that supports requireMMDSV2.
set -euo pipefail

[[ $# -ge 3 ]] || { sed -n 's/^# \{0,1\}//; 2,6p' "$0" >&2; exit 2; }
stack=$1 name=$2 folder=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
control=(aws bedrock-agentcore-control)

deploy() {
  aws cloudformation deploy --stack-name "$stack" --template-file "$here/template.yaml" \
    --capabilities CAPABILITY_IAM --no-fail-on-empty-changeset --parameter-overrides "AgentName=$name" "$@"
}

output() {
  aws cloudformation describe-stacks --stack-name "$stack" --output text \
    --query "Stacks[0].Outputs[?OutputKey=='$1'].OutputValue"
}

parameter() {
  aws cloudformation describe-stacks --stack-name "$stack" --output text \
    --query "Stacks[0].Parameters[?ParameterKey=='$1'].ParameterValue"
}

# poll WHAT OPERATION [ARGUMENT ...]: wait until its status is READY.
poll() {
  local what=$1 status
  shift
  for _ in {1..120}; do
    status=$("${control[@]}" "$@" --query status --output text)
    case $status in
      READY) return ;;
      *FAILED | DELETING)
        echo "$what is $status:" >&2
        "${control[@]}" "$@" --query failureReason --output text >&2
        exit 1 ;;
    esac
    sleep "${POLL_S:-5}"
  done
  echo "$what is still $status after ten minutes" >&2
  exit 1
}

# A runtime is READY before its endpoint serves the new version; an invoke would reach the old one, or none.
wait_ready() {
  local version served
  poll "the runtime" get-agent-runtime --agent-runtime-id "$1"
  version=$("${control[@]}" get-agent-runtime --agent-runtime-id "$1" --query agentRuntimeVersion --output text)
  for _ in {1..120}; do
    poll "the runtime's endpoint" get-agent-runtime-endpoint --agent-runtime-id "$1" --endpoint-name DEFAULT
    served=$("${control[@]}" get-agent-runtime-endpoint --agent-runtime-id "$1" --endpoint-name DEFAULT \
      --query liveVersion --output text)
    [[ $served != "$version" ]] || return 0
    sleep "${POLL_S:-5}"
  done
  echo "the runtime's endpoint still serves version $served instead of $version after ten minutes" >&2
  exit 1
}

# AgentCore refuses to invoke a runtime that does not require MMDSv2, and CloudFormation cannot set it. An update
# replaces the whole configuration, so all of it is passed again.
require_mmdsv2() {
  local required update
  required=$("${control[@]}" get-agent-runtime --agent-runtime-id "$1" \
    --query metadataConfiguration.requireMMDSV2 --output text)
  case $required in [Tt]rue) return ;; esac
  # shellcheck disable=SC2016  # the backquotes belong to JMESPath
  update=$("${control[@]}" get-agent-runtime --agent-runtime-id "$1" --output json --query '{
    agentRuntimeId: agentRuntimeId, agentRuntimeArtifact: agentRuntimeArtifact, roleArn: roleArn,
    networkConfiguration: networkConfiguration, protocolConfiguration: protocolConfiguration,
    lifecycleConfiguration: lifecycleConfiguration, environmentVariables: environmentVariables,
    metadataConfiguration: {requireMMDSV2: `true`}}')
  "${control[@]}" update-agent-runtime --cli-input-json "$update" >/dev/null
  wait_ready "$1"
}

deploy "$@" # the first deploy creates everything except the runtime
repository=$(output RepositoryUri)
image=$repository:$(date -u +%Y%m%d-%H%M%S)

dockerfile=$folder/Dockerfile
if [[ ! -f $dockerfile ]]; then
  dockerfile=$here/agent.Dockerfile
  if [[ -f $folder/.dockerignore ]]; then # Docker would ignore it and read only the Dockerfile's
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    cp "$dockerfile" "$scratch/Dockerfile"
    { cat "$dockerfile.dockerignore"; echo; cat "$folder/.dockerignore"; } >"$scratch/Dockerfile.dockerignore"
    dockerfile=$scratch/Dockerfile
  fi
fi
aws ecr get-login-password | docker login --username AWS --password-stdin "${repository%%/*}"
docker buildx build --platform linux/arm64 --provenance=false --push \
  --build-context "wrapper=$here/.." --file "$dockerfile" --tag "$image" "$folder"

deploy "ImageUri=$image"
runtime=$(output RuntimeId)
wait_ready "$runtime"
require_mmdsv2 "$runtime"

cat <<END
The agent is ready. Attach $(output TrainerPolicyArn) to the trainer's role, and put this into config.yaml:

aws:
  region: $(output RuntimeArn | cut -d: -f4)
storage:
  bucket: $(output BucketName)
END
prefix=$(parameter ResultPrefix)
[[ -z $prefix ]] || echo "  prefix: $prefix"
presigned=$(parameter Presigned)
[[ $presigned != true ]] || echo "  presigned: true"
if [[ $presigned == true || $(parameter RunQueues) == false ]]; then # otherwise each run creates its own
  printf 'queue:\n  url: %s\n' "$(output QueueUrl)"
fi
cat <<END
runtime:
  kind: agentcore
  arn: $(output RuntimeArn)
END
