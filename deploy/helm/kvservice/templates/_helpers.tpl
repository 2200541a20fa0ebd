{{- define "kvservice.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Of the RayCluster. Its pods' names are longer, and must stay below 64 characters. */}}
{{- define "kvservice.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name (include "kvservice.name" .) }}
{{- if .Values.fullnameOverride }}
{{- $name = .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}
{{- $name = .Release.Name }}
{{- end }}
{{- $name = $name | trunc 40 | trimSuffix "-" }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) }}
{{- fail (printf "the name %q of the RayCluster must consist of a-z, 0-9 and -, and begin with a letter: name the release otherwise, or set fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "kvservice.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ include "kvservice.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Of pods; those of a RayCluster have ray.io/cluster from KubeRay as well. */}}
{{- define "kvservice.podLabels" -}}
app.kubernetes.io/name: {{ include "kvservice.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvservice.selector" -}}
ray.io/cluster: {{ include "kvservice.fullname" . }}
{{- end }}

{{- define "kvservice.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvservice.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvservice.image" -}}
{{- $image := .image }}
{{- $repository := $image.repository | default .root.Values.image.repository }}
{{- if $image.digest }}
{{- printf "%s@%s" $repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $repository $image.tag }}
{{- end }}
{{- end }}

{{/* Of workers on GPUs: another image only where one is named. */}}
{{- define "kvservice.gpuImage" -}}
{{- $image := ternary .Values.gpuImage .Values.image (or (ne .Values.gpuImage.repository "") (ne .Values.gpuImage.digest "") (ne .Values.gpuImage.tag "")) }}
{{- include "kvservice.image" (dict "root" . "image" $image) }}
{{- end }}

{{- define "kvservice.managerAddress" -}}
{{- printf "%s-manager.%s.svc:%d" (include "kvservice.fullname" .) .Release.Namespace (int .Values.manager.port) }}
{{- end }}

{{/* Requests are the limits: a worker that is throttled or evicted takes sessions with it. */}}
{{- define "kvservice.resources" -}}
requests:
  {{- toYaml . | nindent 2 }}
limits:
  {{- toYaml . | nindent 2 }}
{{- end }}

{{- define "kvservice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvservice.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvservice.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /home/kvservice
- name: KVSERVICE_RUN_DIR
  value: /home/kvservice/run
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Ray would kill a worker when memory is short, and with it the pages that it holds.
- name: RAY_memory_monitor_refresh_ms
  value: "0"
# The drain is over by then.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: "5"
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A node that hangs is given up after about 15 seconds, rather than a minute. For Ray's head. */}}
{{- define "kvservice.headEnv" -}}
- name: RAY_health_check_initial_delay_ms
  value: "5000"
- name: RAY_health_check_period_ms
  value: "2000"
- name: RAY_health_check_timeout_ms
  value: "3000"
- name: RAY_health_check_failure_threshold
  value: "5"
{{- end }}

{{/* What every container writes to: the root file system is read-only. */}}
{{- define "kvservice.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/kvservice
- name: shm
  mountPath: /dev/shm
{{- end }}

{{- define "kvservice.volumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
# Counts against the container's memory, like all else that it uses.
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ printf "%dMi" (add (div (int64 .Values.ray.objectStoreMemory) 1048576) 64) }}
{{- end }}

{{/* What all pods of the RayCluster have in common. root, component, group (of the values). */}}
{{- define "kvservice.podSpec" -}}
serviceAccountName: {{ include "kvservice.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "kvservice.podSecurity" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Asked of the plain port; the service's own may want TLS and credentials. root, service, port */}}
{{- define "kvservice.readiness" -}}
readinessProbe:
  grpc:
    port: {{ .port }}
    service: {{ .service }}
  initialDelaySeconds: 5
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 3
{{- end }}

{{/* The command that keeps manager and workers there. */}}
{{- define "kvservice.keep" -}}
- kvservice
- up
- --keep
- --name={{ include "kvservice.fullname" . }}
- --address=auto
- --by-resource
- --host={{ .Values.listenHost }}
- --port={{ .Values.manager.port }}
- --manager-address={{ include "kvservice.managerAddress" . }}
- --metrics-port={{ .Values.manager.metricsPort }}
- --health-port={{ .Values.manager.healthPort }}
- --worker-port={{ .Values.workers.port }}
- --lane-port={{ .Values.workers.lanePort }}
- --worker-metrics-port={{ .Values.workers.metricsPort }}
- --worker-health-port={{ .Values.workers.healthPort }}
- --memory={{ .Values.workers.cpu.memoryPercent }}%
- --gpu-memory={{ .Values.workers.gpu.memoryPercent }}%
- --workers={{ .Values.workers.cpu.replicas }}
- --gpu-workers={{ .Values.workers.gpu.replicas }}
- --scale-file=/etc/kvservice/scale/scale.json
{{- if .Values.workers.zeroFreedPages }}
- --zero-freed-pages
{{- end }}
{{- include "kvservice.securityArguments" . }}
{{- end }}

{{- define "kvservice.totalWorkers" -}}
{{- add (int .Values.workers.cpu.replicas) (int .Values.workers.gpu.replicas) }}
{{- end }}

{{/* Cross-checks that a schema cannot make. */}}
{{- define "kvservice.checkSecurity" -}}
{{- with .Values.security }}
{{- $authenticates := or .tokens.secretName .tls.mutual }}
{{- if not .insecure }}
{{- if not $authenticates }}
{{- fail "nobody would be asked who they are: set security.tokens.secretName or security.tls.mutual, or say security.insecure=true" }}
{{- end }}
{{- if not .tls.secretName }}
{{- fail "tokens and pages would travel in plaintext: set security.tls.secretName, or say security.insecure=true" }}
{{- end }}
{{- end }}
{{- if and .tls.mutual (not .tls.secretName) }}
{{- fail "security.tls.mutual needs security.tls.secretName" }}
{{- end }}
{{- if and $authenticates (not .sharedKey.secretName) }}
{{- fail "manager and workers need a key to know each other by: set security.sharedKey.secretName" }}
{{- end }}
{{- if and $.Values.podMonitor.enabled (not .insecure) (not .metricsToken.secretName) }}
{{- fail "Prometheus would be turned away: set security.metricsToken.secretName to a Secret with the token that it presents" }}
{{- end }}
{{- if and .tokens.secretName (not .operatorToken.secretName) }}
{{- fail "pods could not be drained: set security.operatorToken.secretName to a Secret with a token of the role operator" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvservice.serverName" -}}
{{- .Values.security.tls.serverName | default (printf "%s.%s.svc" (include "kvservice.fullname" .) .Release.Namespace) }}
{{- end }}

{{/* For servers. */}}
{{- define "kvservice.securityArguments" -}}
{{- with .Values.security }}
{{- if .insecure }}
- --insecure
{{- end }}
{{- if .tokens.secretName }}
- --tokens=/etc/kvservice/tokens/{{ .tokens.key }}
{{- end }}
{{- if .sharedKey.secretName }}
- --key=/etc/kvservice/key/{{ .sharedKey.key }}
{{- end }}
{{- if .metricsToken.secretName }}
- --metrics-token=/etc/kvservice/metrics/{{ .metricsToken.key }}
{{- end }}
{{- if .quotas.secretName }}
- --quotas=/etc/kvservice/quotas/{{ .quotas.key }}
{{- end }}
{{- if .tls.secretName }}
- --tls-cert=/etc/kvservice/tls/tls.crt
- --tls-key=/etc/kvservice/tls/tls.key
- --tls-ca=/etc/kvservice/tls/ca.crt
- --tls-server-name={{ include "kvservice.serverName" $ }}
{{- end }}
{{- if .tls.mutual }}
- --mutual-tls
{{- end }}
{{- end }}
{{- end }}

{{/* For the chart's own commands, as a list with blanks. */}}
{{- define "kvservice.callingArguments" -}}
{{- with .Values.security }}
{{- if .operatorToken.secretName }} --token-file=/etc/kvservice/operator/{{ .operatorToken.key }}{{ end }}
{{- if .tls.secretName }} --tls-ca=/etc/kvservice/tls/ca.crt --tls-server-name={{ include "kvservice.serverName" $ }}{{ end }}
{{- if .tls.mutual }} --tls-cert=/etc/kvservice/tls/tls.crt --tls-key=/etc/kvservice/tls/tls.key{{ end }}
{{- end }}
{{- end }}

{{/* Which Secrets a component needs, as name=secret pairs. root, component */}}
{{- define "kvservice.secrets" -}}
{{- $security := .root.Values.security }}
{{- $found := dict }}
{{- with $security.tls.secretName }}{{ $_ := set $found "tls" . }}{{ end }}
{{- if eq .component "manager" }}
{{- with $security.tokens.secretName }}{{ $_ := set $found "tokens" . }}{{ end }}
{{- end }}
{{- if ne .component "test" }}
{{- with $security.sharedKey.secretName }}{{ $_ := set $found "key" . }}{{ end }}
{{- with $security.quotas.secretName }}{{ $_ := set $found "quotas" . }}{{ end }}
{{- with $security.metricsToken.secretName }}{{ $_ := set $found "metrics" . }}{{ end }}
{{- end }}
{{- if ne .component "manager" }}
{{- with $security.operatorToken.secretName }}{{ $_ := set $found "operator" . }}{{ end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "kvservice.secretMounts" -}}
{{- range $name, $secret := include "kvservice.secrets" . | fromJson }}
- name: {{ $name }}
  mountPath: /etc/kvservice/{{ $name }}
  readOnly: true
{{- end }}
{{- end }}

{{/* Readable by the group that all processes of the pod have, and by nobody else. */}}
{{- define "kvservice.secretVolumes" -}}
{{- range $name, $secret := include "kvservice.secrets" . | fromJson }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret }}
    defaultMode: 0440
    {{- if and (eq $.component "test") (eq $name "tls") (not $.root.Values.security.tls.mutual) }}
    items:
      - key: ca.crt
        path: ca.crt
    {{- end }}
{{- end }}
{{- end }}

{{/* Takes no new session, waits until those there are have moved or ended, and lets the pod go. */}}
{{- define "kvservice.drain" -}}
- /bin/sh
- -c
- >-
  kvservice drain "$POD_IP:{{ .Values.workers.port }}"
  --address={{ include "kvservice.managerAddress" . }}
  --timeout={{ .Values.workers.drainSeconds }}
  {{- with include "kvservice.callingArguments" . | trim }}
  {{ . }}
  {{- end }}
{{- end }}
