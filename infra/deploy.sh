#!/usr/bin/env bash
# From an agent's folder to a runtime that can be invoked. Run it again to deploy a new image of the same agent.
#
#   infra/deploy.sh STACK AGENT_NAME AGENT_FOLDER [Parameter=Value ...]
#
# The parameters are those of template.yaml. Needs docker with buildx and an AWS CLI that knows requireMMDSV2.
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

wait_ready() {
  local status
  for _ in {1..120}; do
    status=$("${control[@]}" get-agent-runtime --agent-runtime-id "$1" --query status --output text)
    case $status in
      READY) return ;;
      *FAILED)
        echo "the runtime is $status:" >&2
        "${control[@]}" get-agent-runtime --agent-runtime-id "$1" --query failureReason --output text >&2
        exit 1 ;;
    esac
    sleep 5
  done
  echo "the runtime is still $status after ten minutes" >&2
  exit 1
}

# AgentCore refuses to invoke a runtime that does not require MMDSv2, and CloudFormation cannot set it. An update
# makes a new version from what it is given alone, so everything is given again.
require_mmdsv2() {
  local required update
  required=$("${control[@]}" get-agent-runtime --agent-runtime-id "$1" \
    --query metadataConfiguration.requireMMDSV2 --output text)
  case $required in [Tt]rue) return ;; esac
  # shellcheck disable=SC2016  # the backquotes are JMESPath's
  update=$("${control[@]}" get-agent-runtime --agent-runtime-id "$1" --output json --query '{
    agentRuntimeId: agentRuntimeId, agentRuntimeArtifact: agentRuntimeArtifact, roleArn: roleArn,
    networkConfiguration: networkConfiguration, protocolConfiguration: protocolConfiguration,
    lifecycleConfiguration: lifecycleConfiguration, environmentVariables: environmentVariables,
    metadataConfiguration: {requireMMDSV2: `true`}}')
  "${control[@]}" update-agent-runtime --cli-input-json "$update" >/dev/null
  wait_ready "$1"
}

deploy "$@" # the first time this makes everything but the runtime
repository=$(output RepositoryUri)
image=$repository:$(date -u +%Y%m%d-%H%M%S)

dockerfile=$folder/Dockerfile
[[ -f $dockerfile ]] || dockerfile=$here/agent.Dockerfile
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
queue:
  url: $(output QueueUrl)
runtime:
  kind: agentcore
  arn: $(output RuntimeArn)
END
